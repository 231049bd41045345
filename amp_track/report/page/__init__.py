"""The page of a study: one file that answers its question, as HTML and as Markdown."""
