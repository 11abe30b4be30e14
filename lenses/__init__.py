"""Hidden states to vocabulary, and linear maps between depths. Nothing here yet."""
