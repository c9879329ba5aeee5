"""Prepare a model from the command line.

    python boot.py headway.engines.models NAME [--revision R] [--home DIR]

Progress goes to stderr; the last line on stdout is the ModelFolder as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from headway.engines.models import DEFAULT, ModelError, default_home, prepare


def main() -> None:
    """Prepare what the arguments name; exit 1 with one sentence when it cannot be had."""
    parser = argparse.ArgumentParser(prog="headway.engines.models", description="Prepare a model.")
    parser.add_argument("name", nargs="?", default=DEFAULT, help=f"the model (default: {DEFAULT})")
    parser.add_argument("--revision", help="hub revision, or the seed of a synthetic model")
    parser.add_argument("--home", type=Path, default=default_home(), help="where models are kept")
    arguments = parser.parse_args()
    try:
        folder = prepare(arguments.name, arguments.home, arguments.revision)
    except ModelError as error:
        sys.exit(f"headway: {error}")
    sys.stdout.write(json.dumps(folder.to_json()) + "\n")


if __name__ == "__main__":
    main()
