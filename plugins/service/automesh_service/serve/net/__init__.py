"""What stands between the network and the application: sockets, connections, their bounds."""
