"use strict";
// Pages that are opened as files may not fetch each other, which the search does for a summary of each result:
// every one would be an error in the console. Titles and links need no fetch.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
