"""`automesh serve`: the studies of a storage over HTTP, shown, watched, submitted, handed out."""
