"""Tools for the web: pages of allowed hosts, a search engine, a folder of documents."""
