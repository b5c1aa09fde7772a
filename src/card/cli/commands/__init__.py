"""The declarations of all commands: quick to import, as help, completion and errors need all of them."""
