"""`specrej experiment` and `python -m experiments`: settings for your models by measurement."""

from experiments.choose import main

if __name__ == "__main__":
    main()
