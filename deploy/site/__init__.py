"""What the site of the documents needs beyond MkDocs' theme and mkdocstrings."""
