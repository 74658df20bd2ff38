"""`python -m yoro`, as `yoro up` starts its children."""

from yoro.cli import main

main()
