"""Where jobs and gangs of processes run: agents on hosts, how they are started and spoken to."""
