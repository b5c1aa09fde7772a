"""Methods whose target drafts for itself."""
