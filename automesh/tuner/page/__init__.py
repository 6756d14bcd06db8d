"""What the HTML report of a study shows, gathered from the study: nothing is compiled or run."""
