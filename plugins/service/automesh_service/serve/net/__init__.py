"""The layer between the network and the application: sockets, connections, and their bounds."""
