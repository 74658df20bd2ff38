"""From graded rollouts to batches, and what becomes of them."""
