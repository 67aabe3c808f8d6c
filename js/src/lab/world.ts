/** The page as the stream sees it. */

import type { Api } from './request.js';
import type { World } from './stream.js';

export function page(api: Api): World {
  return {
    socket: () => api.socket(),
    get: (path) => api.get(path),
    hidden: () => document.hidden,
    watch(changed) {
      document.addEventListener('visibilitychange', changed);
      window.addEventListener('online', changed);
      return () => {
        document.removeEventListener('visibilitychange', changed);
        window.removeEventListener('online', changed);
      };
    },
    after(milliseconds, then) {
      const timer = setTimeout(then, milliseconds);
      return () => clearTimeout(timer);
    },
    now: () => performance.now(),
    random: Math.random,
  };
}

/** What all pages of this browser share; null where it keeps nothing. */
export function storage(): Storage | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
