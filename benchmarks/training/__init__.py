"""The arms of `benchmarks.trainer`: each measures one thing, in a process of its own."""
