"""Methods in which the target drafts for itself."""
