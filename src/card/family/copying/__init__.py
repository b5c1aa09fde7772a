"""Writers that copy from texts and from passes of the models, and the methods made of them."""
