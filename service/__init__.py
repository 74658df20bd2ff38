"""Everything but the gradient: intake, rewards, baselines, batches, the adapter registry and the API."""
