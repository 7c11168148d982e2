/* Files that a user names: read only when they are files, and known to be writable before the work. */
#ifndef CLI_FILES_H
#define CLI_FILES_H

#include <stdbool.h>
#include <stdio.h>

/* Opens a regular file for reading. Anything else is refused at once: a pipe or a device may never
   answer, or never end. NULL after a sentence. */
FILE *input_open(const char *path);

#endif
