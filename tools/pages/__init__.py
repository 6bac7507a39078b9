"""Writers of the pages, pictures and grammars that the repository keeps."""
