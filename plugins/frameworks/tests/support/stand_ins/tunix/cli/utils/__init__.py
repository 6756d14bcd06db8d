"""Part of a stand-in for Tunix, no Tunix: names, forms and errors that its adapter uses."""
