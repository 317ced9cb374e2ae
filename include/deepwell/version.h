/* The version. It is written here only; the build and the Python package read it. */
#ifndef DEEPWELL_VERSION_H
#define DEEPWELL_VERSION_H

#define DW_VERSION "0.2.0"

#endif
