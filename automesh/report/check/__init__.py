"""What a rule promises beside what the script does today: figures, verdicts, and texts of them."""
