"""`python -m can_train`: the same as the console script."""

from can_train.cli.main import run

if __name__ == "__main__":
    run()
