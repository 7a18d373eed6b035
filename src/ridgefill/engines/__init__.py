"""Where a plan runs: transformers today."""
