"""`python launch.py …` is the same as the installed command `headrace …`."""

from launch.entry import main

if __name__ == "__main__":
    main()
