"""``python -m avagrad``, and the command ``avagrad``."""

import importlib.util
import sys


def main() -> None:
    """Run the command line, or print which packages are missing."""
    missing = [name for name in ("typer", "rich", "optuna") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: the command avagrad needs {' and '.join(missing)}: pip install '.[lab]' in avagrad's folder "
            "(or '.[tune]', for searches only). "
            "(python -m avagrad.lab.train runs without typer and rich.)",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from avagrad.cli import main as run
    except KeyboardInterrupt:  # the imports take a second
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
