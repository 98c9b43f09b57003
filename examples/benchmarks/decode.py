"""The README's decode speeds: `python -m examples.benchmarks.decode`. The parts are those of the suite `decode`.

Writes a JSON file with provenance and a Markdown file with the means of per-prompt ratios.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide_hf import TIDERouters
from tide_hf.loading import shipped_routers

from .bench import Bench
from .common import load_for, setting, study_parser, write_record
from .suites.decode import Settings, run, table


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write and print."""
    parser = study_parser(__doc__, "decode.json", dtype="float32", routers=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6, help="of each category")
    options = parser.parse_args(argv)
    model, tokenizer = load_for(options)
    folder = options.routers or shipped_routers(options.model)
    routers = TIDERouters.from_pretrained(folder) if folder is not None else None
    limits = {name: getattr(options, name) for name in ("max_new_tokens", "repeats", "prompts")}
    record = setting(model) | limits
    record |= run(Bench(model, tokenizer, routers), Settings(**limits, first_token=False))
    write_record(record, options.output)
    options.output.with_suffix(".md").write_text(table(record) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
