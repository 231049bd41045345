"""The report page of a study, as one HTML file and as Markdown."""
