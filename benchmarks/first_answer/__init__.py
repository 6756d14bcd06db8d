"""How soon a dry run has something to say: see `benchmarks.first_answer.command`."""
