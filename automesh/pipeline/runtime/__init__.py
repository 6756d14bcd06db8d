"""The former package of the pipeline runtime: pickles of former versions name classes here."""
