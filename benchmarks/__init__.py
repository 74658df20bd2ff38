"""Side-by-side measurements, each one command (`make bench-NAME`); results lie in `results/`."""
