"""The image worker: fetches a picture, decodes it, and turns it into embeddings in the arena."""
