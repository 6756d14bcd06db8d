"""The HTML report of a study: one document of plain JSON values, and the page that shows it."""
