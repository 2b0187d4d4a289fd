"""The processes of a server: the supervisor, its link to the server, the phases of both and their logs."""
