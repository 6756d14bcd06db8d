"""The process beside a server that reads studies, so that the server itself only sends bytes."""
