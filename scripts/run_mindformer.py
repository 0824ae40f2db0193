"""Launch MindFormers with adaptive loss scaling: the same options as MindFormers' own script of this name."""

from mindformers_adaptive.integration.launcher import main

if __name__ == "__main__":
    main()
