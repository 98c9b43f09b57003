"""One scale of colours for terminal, HTML and plots."""

from tide_hf.common.display.depth_colours import EXITS, FULL_DEPTH, NGRAM, depth_colours, depth_name


def test_every_depth_has_its_colour_shallowest_first():
    colours = depth_colours([30, 8, 0, 4, 8, 30], num_layers=30)
    assert list(colours.items()) == [(0, NGRAM), (4, EXITS[0]), (8, EXITS[1]), (30, FULL_DEPTH)]
    assert depth_colours([], num_layers=30) == {}


def test_colours_come_round_again():
    colours = depth_colours(range(1, 8), num_layers=30)
    assert [colours[depth] for depth in (6, 7)] == [EXITS[0], EXITS[1]]


def test_no_two_colours_are_the_same():
    scale = (FULL_DEPTH, NGRAM, *EXITS)
    assert len({colour.css for colour in scale}) == len({colour.terminal for colour in scale}) == len(scale)


def test_names():
    assert [depth_name(depth, 4) for depth in (0, 2, 4)] == [
        "n-gram draft confirmed",
        "exit layer 2",
        "full depth (4 layers)",
    ]
