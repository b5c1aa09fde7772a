"""Writers that copy from texts and from the passes of the models, and the methods made of them."""
