#include <fattn/base.h>

int fattn_version(void) { return FATTN_VERSION; }

const char *fattn_status_name(fattn_status s) {
    switch (s) {
#define FATTN_X(name, value, text)                                                                                     \
    case name: return #name;
        FATTN_STATUS_MAP(FATTN_X)
#undef FATTN_X
    default: return "FATTN_E_UNKNOWN";
    }
}

const char *fattn_status_text(fattn_status s) {
    switch (s) {
#define FATTN_X(name, value, text)                                                                                     \
    case name: return text;
        FATTN_STATUS_MAP(FATTN_X)
#undef FATTN_X
    default: return "unknown status code";
    }
}
