"""Parts of `benchmarks.ingest`: servers, load, and one module a group of figures."""
