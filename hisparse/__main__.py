"""``python -m hisparse``: the console script, where it is not on the path."""

from hisparse.cli import main

if __name__ == "__main__":
    main()
