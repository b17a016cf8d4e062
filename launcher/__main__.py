"""`python -m launcher`: the tandem command, for the processes that it starts itself."""

from launcher.cli import main

if __name__ == "__main__":
    main(prog_name="tandem")
