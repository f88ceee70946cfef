"""Write a random checkpoint in the released format: `python tools/write_random_checkpoint.py DIR`.

Knows options; deepinfer.testing.tiny draws the values.
"""

import argparse
import json
from pathlib import Path

from deepinfer.testing.tiny import write_random_checkpoint


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--config", type=Path, help="a config.json; default: nine tiny layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outliers", action="store_true", help="heavy tails, as trained nets have")
    arguments = parser.parse_args()
    config = None
    if arguments.config is not None:
        config = json.loads(arguments.config.read_text(encoding="utf-8"))
    note = f"random weights (seed {arguments.seed}): what it writes is noise, not language"
    write_random_checkpoint(arguments.folder, config, arguments.seed, arguments.outliers, note=note)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
