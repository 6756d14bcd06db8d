"""Former home of what runs pipelines: pickles of former versions name classes here."""
