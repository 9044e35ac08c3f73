"""How commands print: tables, sentences, the screen."""
