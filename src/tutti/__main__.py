"""`python -m tutti` is the command line."""

from tutti.cli.main import run

if __name__ == "__main__":
    run()
