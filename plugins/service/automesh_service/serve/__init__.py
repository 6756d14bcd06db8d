"""`automesh serve`: the studies of a storage over HTTP. Users list and watch studies, submit
searches, and download rules."""
