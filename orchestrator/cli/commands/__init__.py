"""What each command takes and says about itself: arguments, help, examples. Nothing heavy is imported here."""
