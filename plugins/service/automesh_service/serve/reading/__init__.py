"""The process that reads studies for a server, so that the server itself only sends bytes."""
