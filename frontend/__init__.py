"""The client's side: engines to embed, clients, text in and out, models, the command line."""
