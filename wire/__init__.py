"""What the processes say to each other, and how they run: messages, codec, sockets, actors."""
