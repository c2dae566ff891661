"""What servers share: access, and rewards that clients give."""
